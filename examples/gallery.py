"""Draw the attention map of every mechanism on one line of text, and Kuramoto's phases layer by layer.

    python examples/gallery.py [--out races/gallery] [--images docs/images]

Trains one small model per mechanism (`nano` on this Python's standard library, a million bytes each, about ten minutes on
one core; a restart trains only missing models), then draws gallery.png and phases.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import altair as alt
import torch
from torch import Tensor

import headtohead as h2h
from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.model.decoder import Decoder
from headtohead.study.environment import provenance

TEXT = "self.name = name"
TOKENS = "1M"
# `sharing` without a tie equals `standard`, and so does FAFO; factorised forms do not support rotary positions.
ARMS: dict[str, dict[str, Any]] = {
    "sharing": {"arm": "sharing:tie=kv"},
    "factorised": {"arm": "factorised:form=CACO", "model": {"positions": "learned"}},
}
# Related mechanisms are adjacent in the figure; those not named here come last.
ORDER = ["standard", "sharing", "diagonal", "coupled", "differential", "factorised"]
ORDER += ["latent", "gated_linear", "gated_delta", "selective_state", "kuramoto", "kuramoto_gated"]
ORDER += ["approximate", "static_emb_qk"]
ORDER += ["fixed_seq_qk", "rnd_emb_qk", "non_approximate", "prefix_mean", "token_mlp", "no_attention"]
COLUMNS, PANEL, CIRCLE = 6, 150, 150
COORDINATES = 3  # number of Kuramoto's phase coordinates drawn
SHADES = {"n": "#0072B2", "a": "#D55E00", "m": "#009E73", "e": "#CC79A7"}
PLAIN = "#9a9a9a"


def trained(out: Path) -> dict[str, Decoder]:
    """Return a trained model of every mechanism by name, training those missing in `out`."""
    names = sorted(
        builtin_mechanisms(), key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)
    )
    arms = [{"arm": name, "name": name} | ARMS.get(name, {}) for name in names]
    settings = {"tokens": TOKENS, "batch": 1024, "lr": 4e-3, "model": {"init_std": 0.08}}
    result = h2h.Study(arms, name="gallery", seeds=1, **settings).run(out, workers=1)
    runs = {entry.label: entry.run for entry in result.manifest.entries}
    return {name: h2h.load(out / "runs" / runs[name]).model for name in names}


@torch.no_grad()
def maps(model: Decoder, tokens: Tensor) -> list[Tensor | None]:
    """Return the map (heads, time, time) of each layer on tokens (1, time), None where a layer has none."""
    found: dict[int, Tensor | None] = {}

    def watch(layer: int) -> Any:
        def before(mechanism: Mechanism, given: tuple[Any, ...]) -> None:
            # The companion's pass comes first; the last call, on the data, overwrites its map.
            weights = mechanism.attention_map(given[0], given[1])
            found[layer] = None if weights is None else weights[0]

        return before

    hooks = [
        block.mechanism.register_forward_pre_hook(watch(layer)) for layer, block in enumerate(model.layers)
    ]
    model.hidden(tokens)
    for hook in hooks:
        hook.remove()
    return [found.get(layer) for layer in range(len(model.layers))]


def most_telling(layers: list[Tensor | None]) -> tuple[int, int, Tensor] | None:
    """Return layer, head and map (time, time) of the head that attends furthest back with the most weight.

    That is the largest mean over queries of sum_j a_ij^2 (i - j). Rows are normalized by their absolute sum, which is
    already 1 unless a map is signed.
    """
    best: tuple[float, int, int, Tensor] | None = None
    for layer, weights in enumerate(layers):
        for head, one in enumerate(weights if weights is not None else ()):
            shares = one / one.abs().sum(-1, keepdim=True).clamp_min(1e-9)
            position = torch.arange(len(one))
            reach = float((shares.square() * (position[:, None] - position)).sum(-1).mean())
            if best is None or reach > best[0]:
                best = (reach, layer, head, shares)
    return best and best[1:]


def map_panel(name: str, model: Decoder, tokens: Tensor) -> Any:
    """Return one mechanism's map: a row for each query character, a column for each key character."""
    found = most_telling(maps(model, tokens))
    label = ARMS.get(name, {}).get("arm", name)
    if found is None:
        blank = alt.Chart(alt.Data(values=[{"text": "no map: no token attends to another"}]))
        note = blank.mark_text(color=PLAIN, fontSize=11, lineBreak=":", lineHeight=14).encode(text="text:N")
        return note.properties(width=PANEL, height=PANEL, title=alt.Title(label))
    layer, head, weights = found
    rows = [
        {"read": i, "seen": j, "weight": float(weights[i, j])} for i in range(len(TEXT)) for j in range(i + 1)
    ]
    letters = f"replace({list(TEXT)!r}[datum.value], ' ', '\\u2423')"
    axis = alt.Axis(
        title=None,
        labelExpr=letters,
        labelAngle=0,
        labelFontSize=8,
        labelFont="monospace",
        labelPadding=2,
        labelOverlap=False,
        ticks=False,
        domain=False,
    )
    signed = model.layers[layer].mechanism.signed
    color = alt.Color(
        "weight:Q",
        scale=alt.Scale(scheme="redblue", type="sqrt", domain=[-1, 1], domainMid=0, clamp=True),
        legend=alt.Legend(
            title="weight",
            orient="bottom",
            direction="horizontal",
            gradientLength=300,
            values=[-1, -0.5, -0.1, 0, 0.1, 0.5, 1],
        ),
    )
    subtitle = f"layer {layer + 1}, head {head + 1}" + (", signed" if signed else "")
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_rect()
        .encode(x=alt.X("seen:O", axis=axis), y=alt.Y("read:O", axis=axis), color=color)
        .properties(width=PANEL, height=PANEL, title=alt.Title(label, subtitle=subtitle))
    )


def gallery(models: dict[str, Decoder], tokens: Tensor) -> Any:
    """Return the figure of all maps."""
    panels = [map_panel(name, model, tokens) for name, model in models.items()]
    return alt.concat(*panels, columns=COLUMNS, spacing=14).properties(
        title=alt.Title(
            f"What each mechanism attends to while reading “{TEXT}”",
            subtitle="row: query character; column: key character; the head that attends furthest back with the most weight",
            fontSize=15,
            subtitleFontSize=12,
            offset=14,
        )
    )


@torch.no_grad()
def phases(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Return Kuramoto's angles (time, width): after embedding, then after coupling and feed-forward of each layer."""
    states: list[Tensor] = []

    def before(_: Any, given: tuple[Any, ...]) -> None:
        states.append(given[0][0])

    parts = [part for block in model.layers for part in (block, block.ffn)]
    hooks = [part.register_forward_pre_hook(before) for part in parts]
    hooks.append(model.norm.register_forward_pre_hook(before))
    model.hidden(tokens)
    for hook in hooks:
        hook.remove()
    return states


def order(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return r and psi (width,) of r e^(i psi) = mean over tokens of e^(i th); r is 1 when all phases are equal."""
    cosine, sine = angles.cos().mean(0), angles.sin().mean(0)
    return torch.hypot(cosine, sine), torch.atan2(sine, cosine)


def circle(angles: Tensor, title: alt.Title | str) -> Any:
    """Return the phases (time,) of one coordinate on the circle, with the order parameter as a line from the center."""
    r, psi = (float(part) for part in order(angles[:, None]))
    reach = 1.65
    rows = [
        {
            "x": math.cos(angle),
            "y": math.sin(angle),
            "x_letter": math.cos(angle) * (1.17 + 0.36 * index / len(TEXT)),
            "y_letter": math.sin(angle) * (1.17 + 0.36 * index / len(TEXT)),
            "letter": TEXT[index].replace(" ", "\u2423"),
            "shade": SHADES.get(TEXT[index], PLAIN),
        }
        for index, angle in enumerate(angles.tolist())
    ]
    ring = [
        {"x": math.cos(step * math.pi / 60), "y": math.sin(step * math.pi / 60), "step": step}
        for step in range(121)
    ]
    line = [{"x": 0, "y": 0, "x2": r * math.cos(psi), "y2": r * math.sin(psi), "text": f"r = {r:.2f}"}]

    def at(name: str, channel: Any) -> Any:
        return channel(f"{name}:Q", axis=None, scale=alt.Scale(domain=[-reach, reach]))

    x, y = at("x", alt.X), at("y", alt.Y)
    shade = alt.Color("shade:N", scale=None)
    tokens, pull = alt.Chart(alt.Data(values=rows)), alt.Chart(alt.Data(values=line))
    layers = [
        alt.Chart(alt.Data(values=ring)).mark_line(color="#cccccc").encode(x=x, y=y, order="step:Q"),
        pull.mark_rule(strokeWidth=3, color="#222").encode(x=x, y=y, x2="x2", y2="y2"),
        tokens.mark_circle(size=55, opacity=0.9).encode(x=x, y=y, color=shade),
        tokens.mark_text(font="monospace", fontSize=10).encode(
            x=at("x_letter", alt.X), y=at("y_letter", alt.Y), text="letter:N", color=shade
        ),
        pull.mark_text(fontSize=11, color="#222", align="left").encode(
            x=alt.value(0), y=alt.value(8), text="text:N"
        ),
    ]
    return alt.layer(*layers).properties(width=CIRCLE, height=CIRCLE, title=title)


def phase_picture(model: Decoder, tokens: Tensor) -> Any:
    """Return the phases of the coordinates that the coupling synchronizes most, before and after each layer."""
    states = phases(model, tokens)
    orders = [order(state)[0] for state in states]
    gained = sum((orders[step] - orders[step - 1] for step in range(1, len(orders), 2)), torch.zeros(1))
    chosen = gained.argsort(descending=True)[:COORDINATES].tolist()
    steps = ["before layer 1"]
    for layer in range(1, len(model.layers) + 1):
        steps += [f"layer {layer}, after coupling", f"after layer {layer}"]
    titles = [
        alt.Title(step, subtitle=f"mean r of all {len(found)}: {float(found.mean()):.2f}")
        for step, found in zip(steps, orders, strict=True)
    ]
    rows = [
        alt.hconcat(
            *(
                circle(state[:, coordinate], title if index == 0 else "")
                for title, state in zip(titles, states, strict=True)
            ),
            spacing=4,
        )
        for index, coordinate in enumerate(chosen)
    ]
    return alt.vconcat(*rows, spacing=4).properties(
        title=alt.Title(
            f"Kuramoto coupling synchronizes the phases of tokens: “{TEXT}” on three of {len(orders[0])} circles",
            subtitle="dot: phase of one character; line: order parameter r, 1 when all phases are equal",
            fontSize=15,
            subtitleFontSize=12,
            offset=14,
        )
    )


def save(chart: Any, file: Path) -> None:
    """Write a chart as PNG at twice its size."""
    import vl_convert

    chart = chart.configure_view(stroke=None).configure_title(
        anchor="start", fontSize=12, subtitleFontSize=10
    )
    file.write_bytes(vl_convert.vegalite_to_png(chart.to_json(), scale=2))


def main() -> None:
    """Train missing models, draw both figures, and print their provenance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("races/gallery"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    alt.data_transformers.disable_max_rows()
    models = trained(given.out)
    tokens = torch.tensor([list(TEXT.encode())])
    save(gallery(models, tokens), given.images / "gallery.png")
    save(phase_picture(models["kuramoto"], tokens), given.images / "phases.png")
    print(provenance())


if __name__ == "__main__":
    main()
