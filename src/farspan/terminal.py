"""What a person sees: the tables and sentences of every command, on one console."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from farspan.record import brief

if TYPE_CHECKING:
    from farspan.evals.scores import Score
    from farspan.workflows.diagnosing import Diagnosis
    from farspan.workflows.evaluating import Evaluated
    from farspan.workflows.explaining import Compared, Positions
    from farspan.workflows.extending import Extended
    from farspan.workflows.inspection import Inspection
    from farspan.workflows.laboratory import Estimate as LabEstimate
    from farspan.workflows.pretraining import Estimate

# Of the processes that torchrun starts, one speaks.
speaks = os.environ.get("RANK", "0") == "0"
out_console = Console(highlight=False, quiet=not speaks)
NAME = 10  # characters of a model's name that a table shows in one line at least


def plain(text: str) -> str:
    """Square brackets in a message are not markup."""
    return text.replace("[", "\\[")


def note(text: str) -> None:
    """What a user should know, beside the results."""
    Console(stderr=True, highlight=False, soft_wrap=True, quiet=not speaks).print(f"[yellow]note[/] {plain(text)}")


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


NOTES = _Notes()  # where warnings of the library go


def show_diagnoses(found: Sequence[Diagnosis], lengths: Sequence[int]) -> None:
    table = _diagnoses(found, lengths)
    while _narrowest(table, found) > out_console.width and len(lengths) > 2:
        lengths = lengths[::-2][::-1]  # every other one, the last among them; the record has them all
        table = _diagnoses(found, lengths)
    out_console.print(table)
    out_console.print()
    for diagnosis in found:
        name = f"[bold]{plain(diagnosis.label)}[/]  " if len(found) > 1 else ""
        out_console.print(f"{name}{plain(diagnosis.verdict)}")


def _narrowest(table: Table, found: Sequence[Diagnosis]) -> int:
    """What a table takes with all its numbers whole, and names folded to no less than NAME characters."""
    longest = max(len(word) for diagnosis in found for word in diagnosis.label.split())
    return _least_width(table) - max(0, longest - NAME)


def _least_width(table: Table) -> int:
    """What a table takes with all words and numbers whole."""
    return out_console.measure(table, options=out_console.options.update(width=10_000)).minimum + 1  # rich forgets one


def _diagnoses(found: Sequence[Diagnosis], lengths: Sequence[int]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption="loss in nats", caption_justify="left")
    table.add_column("model", overflow="fold", min_width=min(NAME, *(len(diagnosis.label) for diagnosis in found)))
    for length in lengths:
        table.add_column(f"@{length}", justify="right", no_wrap=True)
    for column in ("loss\nknee", "entropy\nknee", "heads\ndistracted", "try\nλ̂"):
        table.add_column(column, justify="right", no_wrap=True)
    for diagnosis in found:
        span = max(1, diagnosis.train_length // 4)
        cells = [f"{diagnosis.curves.loss_at(length, min(span, length)):.3f}" for length in lengths]
        knees = [f"{knee:,}" if knee else "none" for knee in (diagnosis.loss_knee, diagnosis.entropy_knee)]
        distracted = f"{len(diagnosis.distracted_heads)} of {diagnosis.heads}"
        suggested = "–" if diagnosis.suggested_scale is None else f"{diagnosis.suggested_scale:g}"
        table.add_row(plain(diagnosis.label), *cells, *knees, distracted, suggested)
    if out_console.measure(table).maximum >= out_console.width:
        table.padding = (0, 1, 0, 0)  # leaves the names more room
    return table


def show_evaluation(found: Evaluated) -> None:
    against = found.base is not None
    shown = [score for score in found.scores if not score.tags.get("detail")]
    columns = ["length", "model" if against else "value", "95% interval", *(("base", "×") if against else ())]
    columns += ["n", "truncated", "skipped"]
    table = _scores(found, shown, columns)
    for spare in ("skipped", "truncated", "n", "95% interval"):  # the record has them all
        if _least_width(table) <= out_console.width:
            break
        columns.remove(spare)
        table = _scores(found, shown, columns)
    if against:
        out_console.print(f"{plain(found.model)} [dim]against[/] {plain(found.base or '')}\n")
    out_console.print(table)
    out_console.print()
    if data := _tagged(shown, "data"):
        out_console.print(f"[dim]data:[/] {plain('; '.join(data))}", soft_wrap=True)
    if trained := _tagged(shown, "trained_on_passkeys"):
        told = [*trained, *(f"the base's: {saw}" for saw in _tagged(found.base_scores, "trained_on_passkeys"))]
        out_console.print(f"[dim]passkey documents in training:[/] {', '.join(told)}")
    for note in found.notes:
        out_console.print(f"[yellow]note[/] {plain(note)}", soft_wrap=True)
    for verdict in found.verdicts:
        mark = "[green]holds[/]" if verdict.holds else "[red]missed[/]"
        out_console.print(f"{mark}  {plain(verdict.gate)}  [dim]{plain(verdict.told)}[/]", soft_wrap=True)
    out_console.print(f"[dim]record, samples and figures in[/] {plain(str(found.folder))}", soft_wrap=True)


def _scores(found: Evaluated, shown: Sequence[Score], columns: Sequence[str]) -> Table:
    from farspan.evals.scores import beside

    table = Table(box=None, padding=(0, 1 if found.base else 2, 0, 0), header_style="dim")
    table.add_column("", overflow="fold")
    styles = {"model": "bold", "value": "bold", "length": "", "base": "", "×": ""}
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, style=styles.get(column, "dim"))
    before = None
    for score in shown:
        task, other = score.tags.get("task", ""), beside(score, found.base_scores)
        what = f"{score.eval} {task}" if task == score.metric != score.eval else f"{score.metric} {task}"
        what = score.metric if task in ("", score.eval) else what
        wide = score.low < score.high  # one window alone, or prompts that all failed, tell of no interval
        cells = {
            "length": f"{score.length:,}",
            "model": brief(score.value),
            "value": brief(score.value),
            "95% interval": f"{brief(score.low)}–{brief(score.high)}" if wide else "",
            "base": brief(other.value) if other else "",
            "×": f"{score.value / other.value:.3f}" if other and other.value else "",
            "n": short(score.n),
            **{name: f"{score.tags.get(name, 0):,}" for name in ("truncated", "skipped")},
        }
        table.add_row("" if what == before else plain(what), *(cells[column] for column in columns))
        before = what
    return table


def _tagged(scores: Sequence[Score], tag: str) -> list[str]:
    """What the scores of single tasks say under a tag, each thing once."""
    return list(dict.fromkeys(s.tags[tag] for s in scores if tag in s.tags and s.tags.get("task") != "average"))


def show_extension(found: Extended) -> None:
    import torch

    from farspan.workflows.inspection import rope_in_words

    patch = found.patch
    for note in found.notes:
        out_console.print(f"[yellow]note[/] {plain(note)}", soft_wrap=True)
    if patch.scales is not None:
        grown = patch.scales.at(torch.tensor([patch.target])).flatten()
        where = f"at {patch.target} keys" if patch.scales.slope is not None else "at any length"
        low, high = f"{grown.min():.2f}", f"{grown.max():.2f}"
        spread = low if low == high else f"{low} to {high}, mean {grown.mean():.2f}"
        out_console.print(f"[dim]λ̂[/] {spread} {where}, {grown.numel()} heads in {len(patch.scales.layers)} layers")
    if patch.rope is not None:
        out_console.print(f"[dim]rope[/] {plain(rope_in_words(patch.rope))}")
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", caption_justify="left")
    passkeys = "; passkey: share told right" if any("passkey" in name for name in found.before) else ""
    table.caption = f"loss in nats{passkeys}"
    table.add_column("")
    lengths = sorted({int(name.partition("@")[2]) for name in found.before})
    for length in lengths:
        table.add_column(f"@{length}", justify="right")
    for kind, digits in (("loss", 3), ("passkey", 2)):
        for when, values in (("before", found.before), ("after", found.after)):
            cells = [values.get(f"{kind}@{length}") for length in lengths]
            if any(cell is not None for cell in cells):
                style = "bold" if when == "after" else ""
                shown = ["" if cell is None else f"{cell:.{digits}f}" for cell in cells]
                table.add_row(f"{kind} {when}", *shown, style=style)
    out_console.print()
    out_console.print(table)
    out_console.print()
    out_console.print(
        f"[dim]reloaded onto a fresh model, the patch moves a logit by up to {found.effect:.2g} and differs from the "
        f"fitted model by {found.proof:.2g}; it is in[/] {plain(str(found.folder))}",
        soft_wrap=True,
    )


def show_estimate(recipe: str, found: Estimate, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**asdict(found), "seconds_at_least": found.seconds}))
        return
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("recipe", recipe)
    facts.add_row("parameters", f"{found.parameters:,}")
    text = "text that is not there yet" if found.files_mb is None else f"{found.files_mb:,.0f} MB of files"
    facts.add_row("tokens", f"{found.tokens:,}, from {text}")
    facts.add_row("memory", f"{_memory(found.weights_gib)} of weights, gradients and optimizer on each device,")
    facts.add_row("", f"about {_memory(found.activations_gib)} of activations for a micro batch")
    facts.add_row(
        "time", f"{_duration(found.seconds)} at least, {found.flops:.2g} FLOP at the {found.rate / 1e12:.3g} TFLOP/s"
    )
    facts.add_row("", "that matrix products reach on this machine, measured now")
    out_console.print(facts)


def show_comparison(found: Compared, as_json: bool) -> None:
    if as_json:
        pairs = [
            {
                "models": [found.models[one], found.models[other]],
                "nearest": each.nearest.tolist(),
                "matched": each.matched.tolist(),
            }
            for (one, other), each in found.pairs.items()
        ]
        heads = dict(zip(found.models, (worth.tolist() for worth in found.ablations), strict=True))
        typer.echo(json.dumps({"tokens": found.tokens, "distances": pairs, "loss_without_head": heads}))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    rule = next(iter(found.pairs.values())).rule if found.pairs else "jsd"
    of = " of those with i < j, by paper B's rule" if rule == "legacy" else ""
    table.caption = (
        f"nats, by layer: nearest pair of heads{of}, then all heads matched one to one; {found.tokens:,} tokens"
    )
    table.add_column("models", overflow="fold")
    for layer in range(len(found.mass[0])):
        table.add_column(str(layer), justify="right")
    for (one, other), each in found.pairs.items():
        table.add_row(
            plain(f"{found.models[one]} · {found.models[other]}"), *(f"{value:.3f}" for value in each.nearest)
        )
        table.add_row("", *(f"{value:.3f}" for value in each.matched), style="dim")
    if found.pairs:
        out_console.print(table)
    else:
        note("one model has nothing to be compared with; name two or more for the distance between them")
    for name, worth, mass in zip(found.models, found.ablations, found.mass, strict=True):
        layer, head = divmod(int(worth.argmax()), worth.shape[1])
        out_console.print(
            f"{name}: without head {head} of layer {layer} the loss rises most, by {worth.max():.3f} nats; it gives "
            f"{mass[layer, head, 0]:.0%} to the token itself and {mass[layer, head, 1]:.0%} to the one before",
            soft_wrap=True,
            markup=False,
        )


def show_theorems(found: Positions, length: int) -> None:
    for proof in found.proofs:
        out_console.print(
            f"{proof.rule:>10}: to {length} tokens the first layer finds positions within {proof.position_error:.0e}, "
            f"and the second scores by distance within {proof.score_error:.0e}",
            soft_wrap=True,
        )
    for name, readings in found.readings.items():
        shares = "  ".join(f"{each.r2:.3f}" for each in readings)
        last = readings[-1]
        told = f"{name}: R² of the position in the embeddings and after each layer  {shares}"
        out_console.print(told, soft_wrap=True, markup=False)
        out_console.print(f"{'':{len(name)}}  off by {last.error:.0f} tokens at the end", soft_wrap=True, markup=False)


def show_tables(tables: Mapping[str, tuple[list[str], list[list[str]]]]) -> None:
    for title, (head, rows) in tables.items():
        table = Table(*head, box=None, padding=(0, 2, 0, 0), header_style="dim")
        for row in rows:
            table.add_row(*row)
        out_console.print(f"\n[bold]{title}[/]\n")
        out_console.print(table)


def show_lab_estimate(found: Sequence[LabEstimate], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found]))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    table.caption = (
        "memory: weights, gradients and optimizer of the largest fleet; time: at least, if nothing but matrix products "
        "took any, at the speed they have on this machine"
    )
    for column in ("encoding", "size", "models", "fleets", "parameters", "tokens", "memory", "time"):
        table.add_column(column, justify="left" if column in ("encoding", "size") else "right")
    for each in found:
        counts = (str(each.models), str(each.fleets), f"{each.parameters:,}", short(each.tokens))
        table.add_row(each.encoding, each.size, *counts, _memory(each.weights_gib), _duration(each.seconds))
    out_console.print(table)
    out_console.print(f"{_duration(sum(each.seconds for each in found))} at least in all")


def _memory(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def _duration(seconds: float) -> str:
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"


def show_inspection(found: Inspection) -> None:
    from farspan.workflows.inspection import ranges

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    heads = f"{found.heads} query, {found.kv_heads} key/value, width {found.head_dim}"
    facts.add_row("family", f"{found.family}, {short(found.parameters)} parameters")
    facts.add_row("heads", f"{heads}, base scale {found.base_scale:.4g}")
    facts.add_row("trained on", f"{found.train_length} tokens" if found.train_length else "unknown")
    if found.query_norm:
        facts.add_row("query norm", found.query_norm)
    if found.temperature:
        facts.add_row("temperature", found.temperature)

    layers = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("layers", "positions", "config reads", "window"):
        layers.add_column(column)
    groups: dict[tuple[str, str, int | None], list[int]] = {}
    for layer in found.layers:
        groups.setdefault((layer.position, layer.claimed, layer.window), []).append(layer.index)
    for (kind, claimed, window), indices in groups.items():
        agrees = claimed in (kind, "unknown")
        layers.add_row(
            ranges(indices),
            f"[bold green]{kind}[/]" if kind == "none" else f"[bold]{kind}[/]",
            claimed if agrees else f"[yellow]{claimed}[/]",
            str(window) if window else "all",
        )

    out_console.print(facts)
    out_console.print()
    out_console.print(layers)
    out_console.print()
    fold = found.fold
    verdict = f"[green]yes[/], into {fold.site}" if fold.possible else "[yellow]no[/]"
    out_console.print(f"[dim]per-head scales fold[/]  {verdict}" + (f" ({plain(fold.why)})" if fold.why else ""))
    for warning in found.warnings:
        out_console.print(f"[yellow]note[/] {plain(warning)}")
    out_console.print()


def short(count: int) -> str:
    """1_234_567 -> "1.2M"."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def size(count: int) -> str:
    """Of a file: 23_700_000 -> "23.7 MB"; an adapter's few thousand bytes are not 0.0 MB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} KB"
