"""What loading a configuration has to tell the user: problems, which stop it, and notices, which do not."""

from dataclasses import dataclass, field

from trivet.errors import ConfigError


@dataclass(slots=True)
class Findings:
    """Collected from every stage, so that one load reports all its problems together."""

    problems: list[str] = field(default_factory=list[str])
    notices: list[str] = field(default_factory=list[str])

    def refuse(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def notice(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)

    def raise_problems(self) -> None:
        """
        Raises:
            ConfigError: there is a problem; its text lists them all.
        """
        if len(self.problems) == 1:
            raise ConfigError(self.problems[0])
        if self.problems:
            raise ConfigError("\n- ".join([f"{len(self.problems)} problems in the configuration:", *self.problems]))
