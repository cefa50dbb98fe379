from gsm8k.environment import load_environment

__all__ = ["load_environment"]
