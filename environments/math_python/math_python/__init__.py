from math_python.environment import load_environment

__all__ = ["load_environment"]
