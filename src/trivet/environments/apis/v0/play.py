"""Runs groups with one environment of the v0 API: plays the rollouts of an example, then scores them together.

`ModelClient`, the client of the inference servers, keeps two things that verifiers would drop: the policy version of each sampled
token, and the token ids of earlier turns. It sends these ids with the next turn, so that the server does not tokenize their text
again.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion

from trivet.environments.apis.groups import Stage, StageBoard, is_infrastructure, limit_time, play_group
from trivet.environments.apis.messages import describe, find_answer, find_example, shorten_messages, to_messages
from trivet.environments.apis.rewards import add_score
from trivet.environments.apis.turns import Turn, later_seed, make_turn, request_arguments, rollout_seed, to_samples
from trivet.environments.apis.v0.score import read_scores, read_turn_rewards, rescore, score_group
from trivet.environments.examples import data_digest, example_hashes
from trivet.errors import RolloutFailed
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import HostSettings


class V0Host:
    """Implements `apis.load.EnvironmentHost` for verifiers 0.3."""

    api = "v0"

    def __init__(
        self,
        env: vf.Environment,
        settings: HostSettings,
        *,
        make_client: Callable[[str], Any],
        stages: StageBoard | None = None,
    ) -> None:
        """Build the data sets of `env`. `make_client` makes the client of the server at a base URL: a `ModelClient`."""
        self._env = env
        self._settings = settings
        self._make_client = make_client
        self._clients: dict[str, Any] = {}
        self._stages = stages or StageBoard()
        train: Any = env.build_dataset()
        held_out: Any = env.build_eval_dataset()
        self._datasets: dict[Split, Any] = {Split.TRAIN: train, Split.EVAL: held_out}
        self.info = EnvironmentInfo(
            num_examples=0 if train is None else len(train),
            num_eval_examples=0 if held_out is None else len(held_out),
            train_digest=data_digest(train),
            eval_digest=data_digest(held_out),
            example_hashes=[] if train is None else example_hashes(train, settings.hash_keys),
        )

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group, or score a recorded one; see `EnvironmentHost.run_group`."""
        settings, name, num_rollouts = self._settings, self._settings.name, request.num_rollouts
        if request.base_url not in self._clients:
            self._clients[request.base_url] = self._make_client(request.base_url)
        client = self._clients[request.base_url]
        example = find_example(self._datasets[request.split], request.example_id)
        if request.recorded:
            return await rescore(self._env, example, request.recorded, client=client, model_name=settings.model_name, name=name)
        async with limit_time(settings.rollout_timeout_s, request):
            with self._stages.stage(Stage.GENERATING, num_rollouts=num_rollouts):
                played = await play_group(lambda index: self._play(example, request, index, client=client), request)
            with self._stages.stage(Stage.SCORING, num_rollouts=num_rollouts):
                states = [state for (state, _), _ in played]
                drops_errors = settings.on_reward_error == "drop"
                scoring_s = await score_group(self._env, states, name=name, drops_errors=drops_errors)
        rollouts: list[Rollout] = []
        for index, ((state, generation_s), num_retries) in enumerate(played):
            rollout = self._to_rollout(state, index, temperature=request.sampling.temperature)
            rollout.generation_s, rollout.scoring_s, rollout.num_retries = generation_s, scoring_s, num_retries
            rollouts.append(rollout)
        return rollouts

    async def _play(
        self, example: Mapping[str, Any], request: GroupRequest, index: int, *, client: Any
    ) -> tuple[dict[str, Any], float]:
        """Play one rollout; return its state, which is not scored yet, and the time it took in seconds.

        A rollout that ended because the policy's call of a tool failed is complete: it is scored like any other, as in verifiers.

        Raises:
            RolloutFailed: another error ended the rollout.
        """
        started = time.monotonic()
        arguments = request_arguments(request.sampling, seed=rollout_seed(request, index), is_plain=self._settings.is_plain)
        copied: Any = dict(example)  # an environment may change it
        state: Any = await self._env.rollout(copied, client, self._settings.model_name, arguments)
        error = state.get("error")
        if error is None or _error_of_policy(state):
            return state, time.monotonic() - started
        error = error if isinstance(error, BaseException) else RuntimeError(str(error))
        cause = error.__cause__ or error
        is_retryable = is_infrastructure(error, has_sampled=bool(state["trajectory"]))
        raise RolloutFailed(describe(cause), kind=type(cause).__name__, is_infrastructure=is_retryable) from error

    def _to_rollout(self, state: dict[str, Any], index: int, *, temperature: float | None) -> Rollout:
        """Return the scored `state` as rollout `index` of its group. With plain servers it has no samples."""
        strategy, is_plain, steps = self._settings.trajectory_strategy, self._settings.is_plain, state["trajectory"]
        reward, scores = read_scores(state, name=self._settings.name)
        turns: list[Turn] = []
        for step in () if is_plain else steps:
            response = step["response"]
            tokens = response.message.tokens
            turn = make_turn(
                prompt_ids=tokens and tokens.prompt_ids,
                completion_ids=tokens and tokens.completion_ids,
                logprobs=tokens.completion_logprobs if tokens else [],
                policy_versions=response.get("policy_versions"),
                routed_experts=response.get("routed_experts"),
                is_truncated=bool(step.get("is_truncated") or response.message.is_truncated),
            )
            turns.append(turn)
        samples, num_broken_prefixes = to_samples(turns, temperature=temperature, strategy=strategy)
        if strategy == "interleaved" and len(turns) > 1:
            add_score(scores, "broken_prefixes", num_broken_prefixes, env=self._settings.name)
        responses = [step["response"] for step in steps]
        token_counts = [response.usage.completion_tokens for response in responses if is_plain and response.usage]
        return Rollout(
            index=index,
            reward=reward,
            samples=samples,
            scores=scores,
            prompt=shorten_messages(state["prompt"]),
            completion=shorten_messages(state.get("completion") or []),
            num_turns=len(steps),
            turn_rewards=read_turn_rewards(state, name=self._settings.name),
            ended_by=_error_of_policy(state),
            ran_out_of_context=bool(state.get("prompt_too_long")),
            is_cut=is_plain and any(response.message.is_truncated for response in responses),
            counted_tokens=sum(token_counts),
        )

    def example(self, *, split: Split, example_id: int) -> Example:
        """Return an example of the data."""
        record = self._datasets[split][example_id]
        return Example(prompt=to_messages(record["prompt"]), answer=find_answer(record))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Close the clients of all servers at the end."""
        try:
            yield
        finally:
            for client in self._clients.values():
                await client.close()


def _error_of_policy(state: Mapping[str, Any]) -> str:
    """Return the type of the error of a tool, called by the policy, that ended the rollout; empty when no such error did."""
    error: Any = state.get("error")
    # verifiers raises a ToolError if a tool failed whose environment ends the rollout on such an error.
    is_from_tool = any(base.__name__ == "ToolError" for base in type(error).__mro__)
    return type(error).__name__ if is_from_tool and state["trajectory"] and not is_infrastructure(error) else ""


class ModelClient(vf.OpenAIChatCompletionsClient):
    """The verifiers client of one server. Each response carries the `policy_versions` of its sampled tokens."""

    def __init__(self, client: AsyncOpenAI, *, keeps_tokens: bool = False) -> None:
        """Send requests through `client`. With `keeps_tokens` a turn begins with the exact tokens of the turn that it continues."""
        super().__init__(client)
        self._keeps_tokens = keeps_tokens

    async def get_response(
        self, prompt: vf.Messages, model: str, sampling_args: vf.SamplingArgs, tools: list[vf.Tool] | None = None, **kwargs: Any
    ) -> vf.Response:
        """Complete `prompt`, with a seed and the known tokens of this turn."""
        state = kwargs.get("state")
        trajectory = state["trajectory"] if state is not None else []
        sampling_args = dict(sampling_args)
        if sampling_args.get("seed") is not None:
            sampling_args["seed"] = later_seed(sampling_args["seed"], "turn", len(trajectory))
        for step in reversed(trajectory) if self._keeps_tokens else ():
            tokens, messages = step["response"].message.tokens, [*step["prompt"], *step["completion"]]
            if tokens is not None and prompt[: len(messages)] == messages:  # the newest turn that `prompt` continues
                known = [*tokens.prompt_ids, *tokens.completion_ids]
                sampling_args["extra_body"] = {**sampling_args.get("extra_body", {}), "known_token_ids": known}
                break
        return await super().get_response(prompt, model, sampling_args, tools, **kwargs)

    async def to_native_prompt(self, messages: vf.Messages) -> Any:
        """Return the messages of a request. A prompt of plain text stays one: the model continues it without a chat template."""
        if len(messages) == 1 and messages[0].role == "text":
            return str(messages[0].content), {}
        return await super().to_native_prompt(messages)

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: vf.SamplingArgs, *args: Any, **kwargs: Any
    ) -> Any:
        """Raise OverlongPromptError, as verifiers expects, for a prompt that fills the whole context."""
        try:
            if isinstance(prompt, str):
                return await self._continue_text(prompt, model, sampling_args)
            return await super().get_native_response(prompt, model, sampling_args, *args, **kwargs)
        except BadRequestError as exc:
            # vLLM's message for a prompt as long as the context. verifiers itself recognizes the message for a longer prompt.
            if "max_tokens must be at least 1" in exc.response.text:
                raise vf.OverlongPromptError from exc
            raise

    async def _continue_text(self, prompt: str, model: str, sampling_args: vf.SamplingArgs) -> ChatCompletion:
        """Complete a plain text by /v1/completions. The answer is returned in the form of a chat completion."""
        wants_logprobs = {"logprobs": 0} if sampling_args.get("logprobs") else {}  # 0: of the sampled token alone
        completions = vf.OpenAICompletionsClient(self.client)
        answer = await completions.get_native_response(prompt, model, {**sampling_args, **wants_logprobs})
        [choice] = answer.choices
        extra = choice.model_extra or {}
        logprobs = [] if choice.logprobs is None else choice.logprobs.token_logprobs or []
        converted = {
            "index": 0,
            "finish_reason": choice.finish_reason,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": {"content": [{"token": "", "logprob": value, "top_logprobs": []} for value in logprobs]},
            **{name: extra.get(name) for name in ("token_ids", "policy_versions", "routed_experts")},
        }
        return ChatCompletion.model_validate(
            {
                **answer.model_dump(exclude={"choices", "object"}),
                "object": "chat.completion",
                "choices": [converted],
                "prompt_token_ids": extra.get("prompt_token_ids"),
            }
        )

    async def raise_from_native_response(self, response: Any) -> None:
        """Accept an empty completion: the policy chose to stop at once, which is a sample like any other."""
        if not response.choices or response.choices[0].finish_reason is None:
            await super().raise_from_native_response(response)

    async def from_native_response(self, response: Any) -> vf.Response:
        """Add the policy versions of the sampled tokens, and the experts of all tokens, to verifiers' response."""
        extra = response.choices[0].model_extra or {}
        experts = extra.pop("routed_experts", None)  # verifiers expects another form of it
        converted = await super().from_native_response(response)
        converted.policy_versions = extra.get("policy_versions")  # type: ignore[attr-defined]  extra fields are allowed
        converted.routed_experts = experts  # type: ignore[attr-defined]  extra fields are allowed
        return converted
