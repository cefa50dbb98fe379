from wiki_search.environment import load_environment

__all__ = ["load_environment"]
