"""What a report shows, gathered from a study's directory: rows for charts and tables, nothing drawn yet."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.numbers import short_count, short_time
from headtohead.study.outline import Contest, Outline
from headtohead.study.store import Store
from headtohead.training.rules import recorded_rules, with_words
from headtohead.training.trainer import LOGGED_POINTS

Row = dict[str, Any]
_CURVE_POINTS = 80
_RATIO_POINTS = 200
_LONGEST = 1e9
"""Seconds above which a logged clock is damage; also keeps infinities out of the charts."""
_BACKWARD = 3
"""Training FLOPs over forward FLOPs: the backward pass does every product twice."""
_ROWS_READ = 100_000
"""Logged rows read for one contest; of more runs than give that many, each so-many-th row is read."""


@dataclass
class ArmFacts:
    """One arm in one contest."""

    label: str
    text: str
    record: Row
    """spec.json of one of its runs, or nothing."""
    planned: int
    results: dict[int, Row]
    costs: list[Row]
    curves: dict[int, list[Row]]

    def finished(self) -> dict[int, Row]:
        """Return the results of its runs that were trained to the end, by seed."""
        return {seed: row for seed, row in sorted(self.results.items()) if row.get("status") == "done"}

    def mean_cost(self, key: str) -> float | None:
        """Return the mean of a measured cost over its runs."""
        values = [float(cost[key]) for cost in self.costs if isinstance(cost.get(key), int | float)]
        return statistics.fmean(values) if values else None


def gather(
    path: Path, outline: Outline, contest: Contest, results: dict[str, Row], damage: list[str]
) -> list[ArmFacts]:
    """Return the arms of a contest with everything their runs left behind; `damage` takes what cannot be read."""
    store = Store(path)
    arms = []
    runs = sum(len(outline.runs(contest, label)) for _, label in outline.arms)
    every = max(1, runs * LOGGED_POINTS // _ROWS_READ)
    for text, label in outline.arms:
        planned = outline.runs(contest, label)
        facts = ArmFacts(label, text, {}, len(planned), {}, [], {})
        for seed, run_id in planned.items():
            run = store.run(run_id)
            if not facts.record and (run.path / "spec.json").is_file():
                try:
                    facts.record = run.spec()
                except UserError as error:
                    damage.append(str(error))
            if run_id in results:
                facts.results[seed] = results[run_id]
            if cost := run.costs():
                facts.costs.append(cost)
            if curve := [_point(row) for row in run.metrics(every) if isinstance(row.get("nats"), float)]:
                facts.curves[seed] = curve
        if not facts.record:
            facts.curves = {}
        arms.append(facts)
    return arms


def curve_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return mean, lowest and highest training loss over seeds, some eighty points per arm.

    Each point carries its tokens, training FLOPs and seconds, so that a chart can take any of them as its x axis.
    """
    rows = []
    for arm in arms:
        per_byte = _tokens_per_byte(arm)
        binned: dict[int, dict[int, list[float]]] = {}
        clock: dict[int, dict[int, float]] = {}
        last = max((row["step"] for curve in arm.curves.values() for row in curve), default=0)
        width = max(1, math.ceil(last / _CURVE_POINTS))
        tokens = {row["step"]: row.get("tokens") for curve in arm.curves.values() for row in curve}
        for seed, curve in arm.curves.items():
            for row in curve:
                place = -(-row["step"] // width)
                binned.setdefault(place, {}).setdefault(seed, []).append(row["nats"] / math.log(2) * per_byte)
                if row.get("seconds") is not None:
                    clock.setdefault(place, {})[seed] = row["seconds"]
        for place, seeds in sorted(binned.items()):
            means = [statistics.fmean(values) for values in seeds.values()]
            seconds = clock.get(place, {})
            step = min(place * width, last)
            count = tokens.get(step) or step * arm.record["training"]["batch"]
            rows.append(
                {
                    "arm": arm.label,
                    "tokens": count,
                    "flops": _BACKWARD * arm.record["flops_per_token"] * count,
                    "seconds": statistics.fmean(seconds.values()) if len(seconds) == len(seeds) else None,
                    "mean": statistics.fmean(means),
                    "low": min(means),
                    "high": max(means),
                    "seeds": len(means),
                }
            )
    return rows


def cost_rows(arms: list[ArmFacts]) -> tuple[list[Row], list[Row]]:
    """Return score and costs of every arm with a finished run, and of every finished run, for one chart.

    `front NAME` says whether no other arm is as good and as cheap by that cost, and better in one of the two.
    """
    means, seeds = [], []
    for arm in arms:
        scores = {seed: result["test"]["bits_per_byte"] for seed, result in arm.finished().items()}
        if not scores or not arm.record:
            continue
        costs = {
            "parameters": arm.record["parameters"],
            "flops": arm.record["flops_per_token"],
            "cache": arm.record.get("cache_bytes_per_token"),
            "rate": arm.mean_cost("tokens_per_second"),
        }
        means.append({"arm": arm.label, "value": statistics.fmean(scores.values()), **costs})
        seeds += [{"arm": arm.label, "seed": seed, "value": value, **costs} for seed, value in scores.items()]
    for name in ("parameters", "flops", "cache", "rate"):
        sign = -1 if name == "rate" else 1  # speed is the one that should be high
        points = [(sign * row[name], row["value"]) for row in means if row[name] is not None]
        for row in means:
            row[f"front {name}"] = row[name] is not None and not any(
                cost <= sign * row[name]
                and value <= row["value"]
                and (cost, value) != (sign * row[name], row["value"])
                for cost, value in points
            )
    return means, seeds


def seed_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return the test score of every finished run."""
    return [
        {"arm": arm.label, "seed": seed, "value": result["test"]["bits_per_byte"]}
        for arm in arms
        for seed, result in arm.finished().items()
    ]


def rate_rows(outline: Outline, contest: Contest) -> list[Row]:
    """Return what each arm scored on valid at every learning rate tried for it; a rate that did not train is left out."""
    place = (contest.corpus, contest.size, contest.shape)
    return [
        {"arm": row.label, "lr": row.lr, "value": row.bits_per_byte, "chosen": row.chosen}
        for row in outline.tuning
        if (row.corpus, row.size, row.shape) == place and row.bits_per_byte is not None
    ]


def ratio_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return the ratio that every rule on a circuit's learning rate gives, at some two hundred steps of the run."""
    rows = []
    for arm in arms:
        training = arm.record.get("training", {})
        steps = max(1, training.get("tokens", 0) // training.get("batch", 1))
        rules, decay = recorded_rules(training)
        for rule in rules:
            for step in sorted({(steps - 1) * place // _RATIO_POINTS for place in range(_RATIO_POINTS + 1)}):
                row = {"arm": arm.label, "rule": rule.words(), "decay": decay}
                rows.append(row | {"tokens": step * training["batch"], "ratio": rule.ratio(step, steps)})
    return rows


def arm_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return one row of results and costs per arm, for the table."""
    rows = []
    for arm in arms:
        done = [result["test"] for result in arm.finished().values()]
        record = arm.record
        seconds = arm.mean_cost("train_seconds")
        rate = arm.mean_cost("tokens_per_second")
        rows.append(
            {
                "label": arm.label,
                "text": arm.text,
                "runs": f"{len(done)}/{arm.planned}",
                "bits_per_byte": statistics.fmean(row["bits_per_byte"] for row in done) if done else None,
                "nats": statistics.fmean(row["nats"] for row in done) if done else None,
                "perplexity": statistics.fmean(row["perplexity"] for row in done) if done else None,
                "spread": statistics.stdev(row["bits_per_byte"] for row in done) if len(done) > 1 else None,
                "parameters": record.get("parameters"),
                "flops": record.get("flops_per_token"),
                "cache": record.get("cache_bytes_per_token"),
                "rate": None if rate is None else short_count(rate),
                "seconds": None if seconds is None else short_time(seconds),
                "tokens": record.get("training", {}).get("tokens"),
                "epochs": next((result.get("epochs") for result in arm.results.values()), None),
            }
        )
    return rows


def configuration(arms: list[ArmFacts]) -> tuple[list[tuple[str, str]], list[Row]]:
    """Return what is equal for all arms as (name, value), and what differs as one row per setting."""
    tables = {arm.label: _settings(arm.record) for arm in arms if arm.record}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    equal, different = [], []
    for name in names:
        values = {label: table.get(name, "–") for label, table in tables.items()}
        if len(set(values.values())) == 1:
            equal.append((name, next(iter(values.values()))))
        else:
            different.append({"name": name, "values": values})
    return equal, different


def environments(path: Path, outline: Outline) -> list[Row]:
    """Return the distinct environments the runs were done in, with how many each."""
    store = Store(path)
    counts: dict[tuple[tuple[str, str], ...], set[tuple[str, str]]] = {}
    for run_id in sorted({entry.run for entry in outline.entries}):
        for stretch in store.run(run_id).stretches():
            key = tuple(
                (name, str(stretch.get(name, "unknown")))
                for name in ("commit", "headtohead", "python", "torch", "device", "threads", "attention")
            )
            day = str(stretch.get("date", ""))[:10]
            counts.setdefault(key, set()).add((run_id, day))
    return [
        {
            **dict(key),
            "runs": len({run for run, _ in places}),
            "dates": ", ".join(sorted({day for _, day in places})),
        }
        for key, places in counts.items()
    ]


def _settings(record: Row) -> dict[str, str]:
    layers, size = record["layers"], record["size"]
    flat = {"mechanism": layers[0] if len(set(layers)) == 1 else ", ".join(layers)}
    flat["parameters"] = f"{record['parameters']:,}"
    flat["forward FLOPs per token (causal)"] = short_count(record["flops_per_token"])
    cache = record.get("cache_bytes_per_token")
    flat["cache bytes per token (bf16)"] = "no cache" if cache is None else f"{cache:,}"
    flat |= {name: str(size[name]) for name in ("width", "layers", "heads", "context", "vocabulary")}
    flat["feed-forward width"] = str(size["ffn"])
    flat |= {f"model: {name}": str(value) for name, value in size["settings"].items()}
    flat |= {f"training: {name}": str(value) for name, value in with_words(record["training"]).items()}
    return flat


def _point(row: Row) -> Row:
    seconds = row.get("seconds")
    return {
        "step": row["step"],
        "tokens": row.get("tokens"),
        "nats": row["nats"],
        "seconds": seconds if isinstance(seconds, int | float) and 0 <= seconds < _LONGEST else None,
    }


def _tokens_per_byte(arm: ArmFacts) -> float:
    """Return tokens over bytes on the test split: what turns bits per token into bits per byte."""
    for result in arm.finished().values():
        return float(result["test"]["tokens"]) / float(result["test"]["bytes"])
    return 1.0
