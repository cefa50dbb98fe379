"""The command `eval`."""


def main() -> int:
    raise SystemExit("eval: not built yet")
