from wordle.environment import load_environment

__all__ = ["load_environment"]
