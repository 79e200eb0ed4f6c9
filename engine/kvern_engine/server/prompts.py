"""From a request's prompt or messages to token ids: rendered and tokenized off the event loop where it takes long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvern_engine.prompt_rules import bad_word_ids
from kvern_engine.server.errors import ApiError, context_length_exceeded
from kvern_engine.server.messages import check_template_kwargs, template_messages
from kvern_engine.server.protocol import shown
from kvern_engine.tokenizer import ChatTemplateError, Tokenizer, TokenizerError

# Below this many characters tokenizing takes well under a millisecond: cheaper than a thread's two switches.
_INLINE_CHARS = 1024
# Above this many characters, or messages, a text has a thread of its own: it must not keep short ones waiting.
_LONG_CHARS = 64 << 10
_LONG_MESSAGES = 512
# A text is tokenized up to this many bytes, or bytes a token of the context where that is more: it takes a second.
_MOST_BYTES = 2 << 20
_MOST_BYTES_A_TOKEN = 16

# Where a message that is continued ends: its own text may stand in the template's text behind it, too.
_MARK = "[kvern: the message goes on here] "

R = TypeVar("R")
Cut = Callable[[list[int]], list[int]]


class PromptReader:
    """Turns prompts into token ids for one tokenizer; `vocab_size` is the model's.

    A tokenizer may know tokens that the model has no row for: they must not reach a worker, which they would break.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._long_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-long")
        template = tokenizer.chat_template
        self._variables = tokenizer.template_variables
        self._knows_developer = template is not None and "developer" in template

    def close(self) -> None:
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, work: Callable[[], R], *, long: bool = False) -> R:
        """`work()` in a thread; `long`: it takes a while, and others of its kind wait for it."""
        pool = self._long_pool if long else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def encode(
        self, text: str, *, special: bool, capacity: int, chat: bool = False, count_only: bool = False
    ) -> list[int]:
        """Token ids of a text. Raises ApiError 400, before tokenizing a huge one, where it is too long to be tokenized
        or, unless `count_only`, cannot fit `capacity` tokens."""
        if len(text) > capacity:
            size = await self._bytes_of(text)
            least = size // self.tokenizer.longest_token
            if least >= capacity and not count_only:
                raise context_length_exceeded(capacity, least, 0, chat=chat, at_least=True)
            most = max(_MOST_BYTES, _MOST_BYTES_A_TOKEN * capacity)
            if size > most:
                what = "messages" if chat else "prompt"
                raise ApiError(
                    f"{what} must be at most {most} bytes of text, got {size}.",
                    param=what,
                    code="string_above_max_length",
                )
        try:
            if len(text) <= _INLINE_CHARS:
                ids = self.tokenizer.encode(text, add_special_tokens=special)
            else:
                long = len(text) > _LONG_CHARS
                ids = await self.off_loop(lambda: self.tokenizer.encode(text, add_special_tokens=special), long=long)
        except TokenizerError as e:
            raise ApiError(f"{e}.", param="messages" if chat else "prompt") from None
        if self.tokenizer.vocab_size > self.vocab_size:
            self.check_ids(ids, "messages" if chat else "prompt")
        return ids

    async def _bytes_of(self, text: str) -> int:
        """How many bytes of UTF-8 a text has."""
        if text.isascii():  # which a string knows of itself
            return len(text)
        if len(text) <= _LONG_CHARS:
            return len(text.encode("utf-8", "replace"))
        return await self.off_loop(lambda: len(text.encode("utf-8", "replace")), long=True)

    async def completion_prompts(
        self, prompt: Any, *, special: bool, capacity: int, most: int, cut: Cut | None = None
    ) -> list[list[int]]:
        """Token ids of each prompt of a completions request, through `cut` where given. Raises ApiError 400."""
        prompts = split_prompts(prompt, most)
        ids = []
        for i, p in enumerate(prompts):
            where = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            if isinstance(p, str):
                tokens = await self.encode(p, special=special, capacity=capacity, count_only=cut is not None)
            else:
                tokens = p
            if cut is not None:
                tokens = cut(tokens)
            if not isinstance(p, str):
                if len(tokens) >= capacity:  # said at once: looking at each of millions takes long
                    raise context_length_exceeded(capacity, len(tokens), 0, chat=False)
                self.check_ids(tokens, where)
            if not tokens:
                raise ApiError(f"{where} has no tokens; give at least one.", param="prompt")
            ids.append(tokens)
        return ids

    async def bad_words(self, words: list[str] | None) -> tuple[tuple[int, ...], ...]:
        """Token ids of a request's bad words. Raises ApiError 400."""
        if not words:
            return ()
        try:
            if sum(map(len, words)) <= _INLINE_CHARS:
                return bad_word_ids(self.tokenizer, words)
            return await self.off_loop(lambda: bad_word_ids(self.tokenizer, words))
        except ValueError as e:
            raise ApiError(f"{e}.", param="bad_words") from None

    def check_ids(self, tokens: list[int], where: str, *, to_read: bool = False) -> None:
        """Raises ApiError 400 for ids outside the model's vocabulary or, where they are only read, the tokenizer's."""
        size = max(self.vocab_size, self.tokenizer.vocab_size) if to_read else self.vocab_size
        if tokens and (min(tokens) < 0 or max(tokens) >= size):
            bad = next(t for t in tokens if not 0 <= t < size)
            text = f"{where}: token id {bad} is outside the vocabulary (0..{size - 1})."
            raise ApiError(text, param=where.partition("[")[0])

    async def chat_text(
        self,
        messages: list[dict[str, Any]],
        *,
        generation_prompt: bool,
        continue_final: bool,
        kwargs: dict[str, Any] | None,
    ) -> str:
        """Messages through the chat template. Raises ApiError 400."""
        if self.tokenizer.chat_template is None:
            raise ApiError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        # Always off the loop: messages may be many, and a template is a program that came with the model.
        return await self.off_loop(
            lambda: self._render(messages, generation_prompt, continue_final, kwargs or {}), long=_is_long(messages)
        )

    def _render(
        self, messages: list[dict[str, Any]], generation_prompt: bool, continue_final: bool, kwargs: dict[str, Any]
    ) -> str:
        extra = check_template_kwargs(kwargs, self._variables)
        checked = template_messages(messages, self._knows_developer)
        if continue_final:
            if generation_prompt:
                text = "continue_final_message and add_generation_prompt exclude each other; give only one as true."
                raise ApiError(text, param="continue_final_message")
            if checked[-1]["role"] != "assistant" or not checked[-1]["content"]:
                text = "continue_final_message needs the last message to be an assistant's with content."
                raise ApiError(text, param="continue_final_message")
        final = checked[-1]["content"]
        if continue_final:
            checked[-1]["content"] = final + _MARK
        try:
            rendered = self.tokenizer.render_chat(checked, add_generation_prompt=generation_prompt, **extra)
        except ChatTemplateError as e:
            late = isinstance(e, TimeoutError)
            hint = "; the limit is template_timeout_seconds" if late else ""
            code = "template_timeout" if late else None
            raise ApiError(f"{e}".rstrip(".") + f"{hint}.", param="messages", code=code) from None
        return _cut_at_mark(rendered, final) if continue_final else rendered

    async def chat_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        generation_prompt: bool,
        continue_final: bool,
        kwargs: dict[str, Any] | None,
        special: bool,
        capacity: int,
        count_only: bool = False,
        cut: Cut | None = None,
    ) -> list[int]:
        """Token ids of a conversation, through `cut` where given. Raises ApiError 400."""
        text = await self.chat_text(
            messages, generation_prompt=generation_prompt, continue_final=continue_final, kwargs=kwargs
        )
        count_only = count_only or cut is not None
        tokens = await self.encode(text, special=special, capacity=capacity, chat=True, count_only=count_only)
        if cut is not None:
            tokens = cut(tokens)
        if not tokens:
            raise ApiError("messages: the chat template makes an empty prompt of them.", param="messages")
        return tokens


def _is_long(messages: list[dict[str, Any]]) -> bool:
    if len(messages) > _LONG_MESSAGES:
        return True
    chars = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            chars += len(content)
        elif isinstance(content, list):
            chars += 256 * len(content)
            chars += sum(len(p["text"]) for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
    return chars > _LONG_CHARS


def _cut_at_mark(rendered: str, content: str) -> str:
    """The prompt up to the mark behind its last message's content, so that the answer goes on from there. A template
    that trims messages takes the mark's space away: then it would have taken those at the content's end."""
    at = rendered.rfind(_MARK.rstrip())
    prompt = rendered[: max(at, 0)]
    if not rendered.startswith(_MARK, at):
        prompt = prompt.rstrip()
    if at < 0 or not prompt.rstrip().endswith(content.strip()):
        raise ApiError(
            "continue_final_message: the chat template changes the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return prompt


def split_prompts(prompt: Any, most: int) -> list[Any]:
    """The prompts of a completions request: each a string or a list of token ids. Raises ApiError 400."""
    allowed = "a string, an array of strings, an array of token ids or an array of arrays of token ids"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(f"prompt must be {allowed}, got {shown(prompt)}.", param="prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if kinds == {str} or kinds == {list}:
        if len(prompt) > most:
            text = f"prompt must have at most {most} prompts (max_prompts_per_request), got {len(prompt)}."
            raise ApiError(text, param="prompt")
        for i, p in enumerate(prompt):
            if isinstance(p, list) and set(map(type, p)) != {int}:
                text = f"prompt[{i}] must be a non-empty array of token ids, got {shown(p)}."
                raise ApiError(text, param=f"prompt[{i}]")
        return prompt
    raise ApiError(f"prompt must be {allowed}, got {shown(prompt)}.", param="prompt")
