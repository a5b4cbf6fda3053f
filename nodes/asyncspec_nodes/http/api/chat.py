"""The chat endpoint's requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncspec_nodes.chat.answers import answer_parser, forced_call, in_content
from asyncspec_nodes.chat.calls import Tool, described
from asyncspec_nodes.chat.stepwise import Parser
from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.billing import BILLING_HEADER, without_billing
from asyncspec_nodes.http.api.chat_answers import ChatCompletion, ChatParameters
from asyncspec_nodes.http.api.chat_messages import (
    ChatMessage,
    ToolChoice,
    ToolSpec,
    joined,
    plain,
    reported,
    spread,
)
from asyncspec_nodes.http.api.completions import Completion, Json
from asyncspec_nodes.http.api.errors import invalid
from asyncspec_nodes.serving.requests import encode_chat
from asyncspec_nodes.serving.templates import EFFORT, SWITCHES, ChatFacts
from asyncspec_nodes.serving.text import CONTINUES
from asyncspec_protocol.messages import Submit
from asyncspec_protocol.sampling import MAX_INT, NewTokens, TopLogprobs


class Switch(Struct, frozen=True):
    """``thinking`` and ``reasoning``: whether and how much to reason."""

    type: str | None = None
    enabled: bool | None = None
    effort: str | None = None

    @property
    def on(self) -> bool | None:
        """None: it does not say."""
        return self.enabled if self.type is None else self.type != "disabled"


class ChatRequest(ChatParameters, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: tuple[ChatMessage, ...]
    max_completion_tokens: NewTokens | None = None
    # 1 and 0, as some languages have it.
    logprobs: bool | Annotated[int, Meta(ge=0, le=1)] | None = None
    top_logprobs: TopLogprobs | None = None
    tools: tuple[ToolSpec, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # The same in the words of DeepSeek, OpenRouter and others.
    enable_thinking: bool | None = None
    thinking: bool | Switch | None = None
    reasoning: bool | Switch | None = None
    # Whether the answer goes on with the last message, and whether a new turn is begun.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is given without logprobs: true", "top_logprobs")
        if not self.messages:
            raise invalid("messages is empty; give at least one", "messages")
        if self.continues and self.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt are both true; leave one out",
                "continue_final_message",
            )
        for i, spec in enumerate(self.tools or ()):
            if not spec.function.name:
                raise invalid(f"tools[{i}]: the name is missing; give the function's", "tools")
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and getattr(choice, choice.type) is None:
            where = f"tool_choice.{choice.type}"
            raise invalid(f"missing parameter: {where}", where, "missing_required_parameter")
        if self.forced and not self.callable:
            raise invalid("tool_choice asks for a call of a tool that is not given", "tool_choice")

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message."""
        return bool(self.continue_final_message or self.messages[-1].continued)

    @property
    def effort(self) -> str | None:
        """How much to reason; None: not given."""
        switch = self.reasoning
        return self.reasoning_effort or (switch.effort if isinstance(switch, Switch) else None)

    @property
    def template_options(self) -> dict[str, Any]:
        """Arguments of the template as they are given."""
        options = self.chat_template_kwargs or {}
        if options.keys() & {*SWITCHES}:
            return options
        switches = (self.enable_thinking, self.thinking, self.reasoning)
        turned = (one.on if isinstance(one, Switch) else one for one in switches)
        on = next((value for value in turned if value is not None), None)
        return options if on is None else {SWITCHES[0]: on, **options}

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        choice = self.tool_choice
        return choice.required if isinstance(choice, ToolChoice) else choice == "required"

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return ()
        tools = self._tools()
        if isinstance(self.tool_choice, ToolChoice):
            return tuple(tool for tool in tools if tool.name in self.tool_choice.names)
        return tools

    @property
    def calls(self) -> int:
        said = (part for message in self.messages for part in spread(message))
        return sum(len(part.tool_calls or ()) for part in said)

    def _tools(self) -> tuple[Tool, ...]:
        functions = [spec.function for spec in self.tools or ()]
        return tuple(Tool(f.name, f.description or "", f.parameters or {}) for f in functions)

    def options(self, facts: ChatFacts) -> dict[str, Any]:
        """Arguments of the template. Raises ``ApiError``."""
        options = facts.named(self.template_options)
        if self.continues:
            options |= {CONTINUES: True, "add_generation_prompt": False}
        elif self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        effort = self.effort
        if not effort:
            return options
        asked: dict[str, Any] = {EFFORT: effort} if EFFORT in facts.options else {}
        if facts.switch is not None:
            asked[facts.switch] = effort != "none"
        if asked:
            return asked | options
        if effort == "none" and facts.opened(options):
            raise invalid(
                "the target's chat template always reasons; leave reasoning_effort out",
                "reasoning_effort",
                "unsupported_value",
            )
        return options

    def call(self, context: RequestContext) -> Completion:
        """The call that answers this request. Raises ``ApiError``."""
        return ChatCompletion(self, [self.prepared(context)], context)

    def prepared(self, context: RequestContext) -> Submit:
        """The request for an answer. Raises ``ApiError``."""
        facts = context.facts
        options = self.options(facts)
        if self.effort and EFFORT not in facts.options and facts.switch is None:
            context.note(("reasoning_effort",))
        said = [(i, part) for i, message in enumerate(self.messages) for part in spread(message)]
        messages = []
        for i, part in said:
            read = plain(part, f"messages[{i}]", native=facts.takes_tools)
            content = str(read["content"])
            if read["role"] == "system" and (rest := without_billing(content)) != content:
                context.note((BILLING_HEADER,))
                if not rest:
                    continue
                read = {**read, "content": rest}
            messages.append(read)
        if not facts.takes_tools and any(part.role == "tool" for _, part in said):
            messages = joined(messages)  # results became messages of the user
        tools: list[Json] = []
        if self.callable and facts.takes_tools:
            tools = [spec.plain() for spec in self.tools or ()]
        elif self.callable:
            messages = reported(messages, described(self.callable))
        # Without a limit an answer may fill the context.
        submit = replace(
            self.submit(self.limit or MAX_INT, context.tenant),
            chat=encode_chat(messages, tools, options),
            text_lengths=bool(facts.reasoning) or facts.syntax == "harmony",
            log_probs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
        )
        opened, grammar = _opened(facts, options), submit.constraint.grammar
        if self.forced:
            named = isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function
            parallel = self.parallel_tool_calls is not False and not named
            try:
                grammar = forced_call(facts, self.callable, parallel=parallel, opened=opened)
            except ValueError as error:
                raise invalid(f"tools: {error}", "tools", "invalid_value") from None
        elif grammar:
            grammar = in_content(facts, grammar, opened=opened)
        return replace(submit, constraint=replace(submit.constraint, grammar=grammar))

    def form(self) -> tuple[str, str]:
        """See ``CompletionParameters``; a forced call has its own form."""
        return ("", "tools") if self.forced else super().form()

    def parser(self, facts: ChatFacts) -> Parser:
        parallel = self.parallel_tool_calls is not False
        opened = _opened(facts, self.options(facts))
        return answer_parser(facts, self.callable, parallel=parallel, opened=opened)


def _opened(facts: ChatFacts, options: Mapping[str, Any]) -> bool:
    """Whether an answer begins with reasoning; one that goes on with a message does not."""
    return not options.get(CONTINUES) and facts.opened(options)
