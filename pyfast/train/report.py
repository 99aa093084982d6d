"""What the screen says about a run: the facts, gathered from the trainer, for `display` to draw."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pyfast.nn.layout import get_layout, split_bounds
from pyfast.train.config import TrainConfig, settings_to_show
from pyfast.train.display import Display, EndInfo, Sample, StartInfo, clock
from pyfast.train.metrics import FILE_NAME, StepMetrics
from pyfast.train.optimizer import describe_groups

SAMPLE_TOKENS = 160
SAMPLE_PROMPT = 16  # tokens
NOISE = 0.6  # a mean loss above this part of ln(vocabulary), that of a random guess, writes no words yet
BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8
RANKS_DRAWN = 8  # more are summed up


class Reporter:
    """Shows one run on a `Display`. `command`: what the user typed, to be repeated with changes."""

    def __init__(self, display: Display, command: str = "pyfast train"):
        self.display = display
        self.command = command
        self.broken: str | None = None  # why nothing can be shown any more

    def start(self, trainer: Any, start: Any, moved_to: Path | None) -> None:
        """Draw the panel of what is about to run."""
        self._show(self.display.start, start_info(trainer, start, moved_to))

    def step(self, metrics: StepMetrics) -> None:
        """Show one step."""
        self._show(self.display.step, metrics)

    def close(self) -> None:
        """Take the progress bar down."""
        self._show(self.display.close)

    def end(self, trainer: Any, result: Any, sample: Sample | str | None) -> None:
        """Draw what was done and what to do next."""
        self._show(self.display.end, end_info(trainer, result, sample, self.command))

    def _show(self, draw: Callable[..., None], *facts: Any) -> None:
        """Draw, unless the screen is gone: a closed pipe or terminal must not cost the steps since the last save."""
        if self.broken is not None:
            return
        try:
            draw(*facts)
            if sys.stdout is not None:
                sys.stdout.flush()
        except (OSError, SystemExit) as error:  # rich makes a SystemExit of a broken pipe
            cause = error if isinstance(error, OSError) else error.__context__
            self.broken = f"Standard output is gone ({cause})."


def start_info(trainer: Any, start: Any, moved_to: Path | None) -> StartInfo:
    """The facts of the start panel."""
    config, model = trainer.config, trainer.model_config
    dataset = trainer.dataset
    notices = list(start.notices)
    if start.path is not None:
        notices.insert(0, f"Resumed from {shown(start.path)}: {start.step} of {config.train.steps} steps are done.")
    if moved_to is not None:
        notices.append(f"Lines of {FILE_NAME} for later steps were moved to {shown(moved_to)}.")
    named = list(trainer.model.named_parameters())
    return StartInfo(
        model=f"{model.layers} layers, width {model.width}, "
        f"{model.heads} heads / {model.kv_heads} kv of {model.head_size}, "
        f"ffn {model.ffn_width}, vocabulary {model.vocab}",
        parameters=sum(torch.Size(get_layout(parameter).shape).numel() for _, parameter in named),
        data=f"{dataset.tokens:,} tokens in {dataset.documents:,} documents, {dataset.rows:,} sequences of "
        f"{dataset.sequence_length}; this run reads {dataset.epoch(config.train.steps):.2g} times all of it",
        layout=[f"{trainer.world_size} ranks x {torch.get_num_threads()} threads"] + draw_layout(config, model),
        groups=describe_groups(named, config.optimizer),
        settings=settings_to_show(config),
        first_step=trainer.step + 1,
        steps=config.train.steps,
        log_every=config.log.every,
        notices=notices,
    )


def draw_layout(config: TrainConfig, model: Any) -> list[str]:
    """One line a rank: its place in the mesh and what it holds. For many ranks one line a dimension of the mesh."""
    sizes, order = config.parallel.sizes(), config.parallel.order.split("-")
    if math.prod(sizes[name] for name in order) > RANKS_DRAWN:
        return _dimensions(config, model, sizes, order)
    places = itertools.product(*(range(sizes[name]) for name in reversed(order)))
    lines = []
    for rank, place in enumerate(places):
        where = dict(zip(reversed(order), place, strict=True))
        holds = _tensor_share(model, sizes["tp"], where["tp"])
        if sizes["dp"] > 1:
            low, high = split_bounds(config.train.global_batch, sizes["dp"], where["dp"])
            holds += f", {high - low} of {config.train.global_batch} sequences a step"
        cut = " ".join(f"{name} {where[name]}" for name in order if sizes[name] > 1)
        lines.append(f"rank {rank}{f' ({cut})' if cut else ''}: {holds}")
    return lines


def _dimensions(config: TrainConfig, model: Any, sizes: dict[str, int], order: list[str]) -> list[str]:
    """What is shared out over each dimension of the mesh, and how far apart the ranks are that share it."""
    parts = {"heads": model.heads, "kv heads": model.kv_heads, "ffn": model.ffn_width, "vocabulary": model.vocab}
    batch, lines, apart = config.train.global_batch, [], 1
    for name in order:
        if name == "tp" and sizes[name] > 1:
            shares = (f"{_share(length, sizes[name])} of {length} {part}" for part, length in parts.items())
            lines.append(f"tensor parallel {sizes[name]}, ranks {apart} apart: {', '.join(shares)} each")
        if name == "dp" and sizes[name] > 1:
            each = _share(batch, sizes[name])
            lines.append(f"data parallel {sizes[name]}, ranks {apart} apart: {each} of {batch} sequences a step each")
        apart *= sizes[name]
    return lines


def _share(length: int, ranks: int) -> str:
    """How much of `length` one of `ranks` has: `16`, or `16-17` where it is not the same for all."""
    low, rest = divmod(length, ranks)
    return f"{low}-{low + 1}" if rest else str(low)


def _tensor_share(model: Any, ranks: int, rank: int) -> str:
    if ranks == 1:
        return "the whole model"
    parts = {"heads": model.heads, "kv heads": model.kv_heads, "ffn": model.ffn_width, "vocabulary": model.vocab}
    words = []
    for name, length in parts.items():
        low, high = split_bounds(length, ranks, rank)
        words.append(f"{name} {low}-{high - 1}" if high - low > 1 else f"{name} {low}")
    return ", ".join(words)


def end_info(trainer: Any, result: Any, sample: Sample | str | None, command: str) -> EndInfo:
    """The facts of the last table and the next commands."""
    config = trainer.config
    past = result.step > config.train.steps
    rows = {"steps": str(result.step) if past else f"{result.step} of {config.train.steps}"}
    if result.last is not None:
        tokens = (result.last.step - result.first.step + 1) * result.last.tokens
        count = result.recent.steps
        when = f"over the last {count} steps" if count > 1 else f"at step {result.last.step}"
        rows["loss"] = (
            f"{result.first.loss:.4f} at step {result.first.step}, {result.recent.loss:.3f} {when} (nats per token)"
        )
        rows["speed"] = f"{tokens:,} tokens in {clock(result.seconds)}, {tokens / result.seconds:,.0f} tokens/s"
        rows["memory"] = f"{result.last.memory_bytes / 2**20:,.0f} MiB on rank 0, at most"
    rows["checkpoint"] = shown(result.checkpoint) if result.checkpoint else "none (checkpoint.directory = null)"
    rows["metrics"] = shown(Path(config.log.directory) / FILE_NAME)
    already = f"is at step {result.step}, past train.steps = {config.train.steps}" if past else "is finished already"
    titles = {"finished": "done", "stopped": "stopped before the end", "nothing to do": f"this run {already}"}
    return EndInfo(titles[result.status], rows, sample, _next_commands(config, result, command))


def _next_commands(config: TrainConfig, result: Any, command: str) -> list[str]:
    if result.status == "stopped":
        if result.checkpoint is None:
            return [f"{command}    # starts anew: no checkpoint was kept"]
        return [f"{command}    # goes on from step {result.step}"]
    directory = config.log.directory.rstrip("/")
    commands = [
        f"{with_option(command, '--train.steps', str(2 * result.step))}    # train on",
        f"{with_option(command, '--log.directory', directory + '-2')}    # start anew beside it",
    ]
    if result.status == "finished" and result.checkpoint is not None:
        commands.insert(
            0,
            f"pyfast convert {shown(result.checkpoint)} {shown(Path(config.log.directory) / 'hugging-face')}"
            "    # for transformers",
        )
    if config.data.paths is None:
        commands.append("pyfast train --data.paths my-text.txt --log.directory my-run    # on your own text")
    return commands


def with_option(command: str, option: str, value: str) -> str:
    """The command with `option value`, in place of what it said about that option."""
    words, kept = shlex.split(command), []
    while words:
        word = words.pop(0)
        if word == option:
            del words[:1]
        elif not word.startswith(option + "="):
            kept.append(word)
    return shlex.join([*kept, option, value])


def sample_text(trainer: Any, result: Any, tokens: int = SAMPLE_TOKENS) -> Sample | str:
    """What the model writes after the first words of its data; or, while that would be noise, why there is none.

    A collective: all ranks call it and all get the same text.
    """
    from pyfast.models import generate

    limit = NOISE * math.log(trainer.model_config.vocab)
    # Rank 0 decides: rounding must not make one rank wait for another in the middle of a sample.
    loss = trainer.mesh.group("world").all_gather_object(result.recent.loss, name="loss of the last steps")[0]
    if loss > limit:
        return f"too early for a sample: the mean loss is {loss:.2f}, and above {limit:.2f} what it writes is noise."
    room = trainer.model_config.max_positions
    prompt = first_tokens(trainer.dataset, trainer.tokenizer, min(SAMPLE_PROMPT, room // 2))
    if not prompt:
        return "no sample: the model can read only a token or two, so there is no room for one."
    written = generate(
        trainer.model,
        torch.tensor([prompt]),
        min(tokens, room - len(prompt)),
        temperature=0.7,
        seed=trainer.config.train.seed,
    )[0].tolist()
    kept = [token for token in written[len(prompt) :] if token < trainer.tokenizer.vocab_size]
    before = trainer.tokenizer.decode(prompt)
    whole = trainer.tokenizer.decode(prompt + kept)
    # Decoded together, or a tokenizer that drops the first space of a text would join the two.
    after = whole.removeprefix(before) if whole.startswith(before) else trainer.tokenizer.decode(kept)
    return Sample(printable(before), printable(after))


def first_tokens(dataset: Any, tokenizer: Any, count: int) -> list[int]:
    """Up to `count` tokens of the first document that has any, not cut within a character."""
    for source in dataset.sources:
        for start, end in itertools.pairwise(source.offsets):
            ids = [
                token for token in source.ids[start : min(end, start + count)].tolist() if token != tokenizer.end_token
            ]
            if ids:
                return _whole_characters(ids, tokenizer)
    return []


def _whole_characters(ids: list[int], tokenizer: Any) -> list[int]:
    """`ids` without the tokens of a last character that is incomplete; as they are when no more than that is left."""
    for length in range(len(ids), max(len(ids) - BYTES_OF_A_CHARACTER, 0), -1):
        if not tokenizer.decode(ids[:length]).endswith("\N{REPLACEMENT CHARACTER}"):
            return ids[:length]
    return ids


def printable(text: str) -> str:
    """`text` with a mark in place of each character that a terminal would obey rather than show."""
    return "".join(mark if mark.isprintable() or mark in "\n\t" else "\N{REPLACEMENT CHARACTER}" for mark in text)


def shown(path: str | Path) -> str:
    """A path as it is shorter to read: relative when it lies below the current directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
