"""The sections on bytes and on lost ranks: where the exchange loses, and what replicas are good for beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from relibra.cluster import Cluster
from relibra.planning.analysis.fault_coverage import replica_cover, step_cover
from relibra.planning.costs import ExpertShape
from relibra.planning.traffic.byte_ledger import ByteLedger, byte_ledger
from relibra.reporting.data.compared_plans import STATIC, Side
from relibra.reporting.data.sentences import count, percent
from relibra.reporting.html.html import paragraph, section, table
from relibra.reporting.html.html_bars import Bar, bar_table
from relibra.reporting.html.svg_lines import line_legend, line_panel

MAX_COVER_ROWS = 16

FACTORS = (
    ("efficiency_L", "efficiency", "useful / capacity"),
    ("data_factor_L", "data factor", "useful / received"),
    ("routing_factor_L", "routing factor", "received / all that ports sent"),
    ("port_factor_L", "port factor", "all that ports sent / capacity"),
)


ONCE_FACTORS = tuple(factor for factor in FACTORS if factor[1] in ("routing factor", "port factor"))
"""Those that can be below one where each token goes to a rank once."""


def ledgers(
    before: Side,
    after: Side,
    cluster: Cluster,
    expert: ExpertShape,
    distinct: Mapping[str, np.ndarray] | None = None,
    *,
    known: bool,
) -> list[tuple[str, ByteLedger]]:
    """Return the ledger of each side as the executor sends, each token to a rank once, then the plan's without that.

    distinct   of each side by name, from the tokens themselves (`distinct_rows_of_step`); None: bounds from pairs
    known      anybody counted which experts tokens pick together; False: a row per token-slot, of both sides
    """
    found = []
    for side, once in ((before, True), (after, True), (after, False)) if known else ((before, False), (after, False)):
        ledger = byte_ledger(
            side.plan,
            side.demand,
            cluster,
            expert.row_bytes,
            distinct_MLRR=None if distinct is None else distinct[side.name],
            send_once=once,
        )
        found.append((f"{side.name}, per choice" if known and not once else side.name, ledger))
    return found


def ledger_section(
    found: Sequence[tuple[str, ByteLedger]], layer_ids: np.ndarray, cluster: Cluster, *, known: bool
) -> str:
    """Show useful, duplicate and forwarded bytes and the three factors, in all and per layer; nothing on one rank.

    known   anybody counted which experts tokens pick together: without, no duplicate can be told
    """
    totals = [(name, ledger.total()) for name, ledger in found]
    if not any(ledger.useful_L.any() for _, ledger in totals):
        return ""
    exact = all(ledger.exact for _, ledger in found)
    counted = (
        "Useful bytes are counted token by token."
        if exact
        else "Useful bytes are a lower bound from which experts tokens pick together."
        if known
        else "Nobody counted which experts tokens pick together, so every row counts as useful."
    )
    sent = (
        f"{found[0][0]} and {found[1][0]}: each token to a rank once, as the executor sends. Per choice: a row "
        "for every choice, so that tokens come twice."
        if known
        else "The executor sends each token to a rank once."
    )
    rails = (
        " Between nodes a row enters at the rank of the same number and is forwarded from there."
        if cluster.num_nodes > 1
        else " On a single node nothing is forwarded."
    )
    names = [name for name, _ in found]
    shown = [factor for factor in FACTORS if known or factor[1] != "data factor"]
    panels = "".join(
        line_panel(f"{title}: {what}", layer_ids.tolist(), [(name, getattr(one, key)) for name, one in found])
        for key, title, what in shown
    )
    return section(
        "bytes",
        "Where the exchange loses: the byte ledger",
        paragraph(_ledger_in_words(totals, known=known)),
        paragraph(
            "Forward dispatch, over all micro-batches; the combine and the backward pass run the same ways. Useful: "
            "the first copy of a token at a rank. Duplicate: further copies. Forwarded: what passes through a rank. "
            "Capacity: what all ports could send until the busiest is done, by the link rates of "
            f"{cluster.name} ({cluster.label}). Efficiency = data × routing × port factor (arXiv 2604.14690); an "
            f"identity, not three independent causes.{rails} {counted} {_capital(sent)}",
            "how",
        ),
        table(
            "Byte ledger",
            ("all layers together", *(name for name, _ in totals)),
            _ledger_rows([ledger for _, ledger in totals]),
            text_columns=(0,),
        ),
        line_legend(names),
        f'<div class="panels">{panels}</div>',
        _per_layer(found, layer_ids),
    )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _ledger_in_words(totals: Sequence[tuple[str, ByteLedger]], *, known: bool) -> str:
    """Speak of what is run; nothing comes twice in it, so that the lowest factor is never the data factor."""
    before, after = totals[0], totals[1]
    first = f"the {STATIC}" if before[0] == STATIC else before[0]
    worst = min(
        ((name, float(getattr(after[1], key)[0])) for key, name, _ in ONCE_FACTORS), key=lambda factor: factor[1]
    )
    levers = {
        "routing factor": "detours weigh most, which locality saves",
        "port factor": "waiting ports weigh most, of busy ranks or because one kind of link is slower than the other",
    }
    once = ", where each token goes to a rank once, as the executor sends it" if known else ""
    words = (
        f"The links carry {percent(float(before[1].efficiency_L[0]))} of what they could with {first}, "
        f"{percent(float(after[1].efficiency_L[0]))} with {after[0]}{once}. The lowest factor of {after[0]} is the "
        f"{worst[0]}, {percent(worst[1])}: {levers[worst[0]]}."
    )
    if not known:
        return words
    each = totals[2][1]
    return (
        f"{words} Were each choice sent by itself, it would be {percent(float(each.efficiency_L[0]))}: only "
        f"{percent(float(each.data_factor_L[0]))} of the bytes received would be new to their rank."
    )


def _ledger_rows(totals: Sequence[ByteLedger]) -> list[list[str]]:
    sizes = (("useful_L", "useful, GB"), ("duplicate_L", "duplicate, GB"), ("forwarded_L", "forwarded, GB"))
    return [
        *([name, *(_gigabytes(getattr(one, key)[0]) for one in totals)] for key, name in sizes),
        *(
            [f"{name}: {what}", *(percent(float(getattr(one, key)[0])) for one in totals)]
            for key, name, what in FACTORS
        ),
    ]


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}" if size < 1e12 else count(round(size / 1e9))


def _per_layer(found: Sequence[tuple[str, ByteLedger]], layer_ids: np.ndarray) -> str:
    (first, before), (second, after) = found[:2]
    factors = (FACTORS[0], *ONCE_FACTORS)
    rows = [
        [str(layer)]
        + [f"{100 * getattr(before, key)[i]:.0f} → {100 * getattr(after, key)[i]:.0f}" for key, _, _ in factors]
        for i, layer in enumerate(layer_ids.tolist())
    ]
    header = ("layer", *(f"{name.removesuffix(' factor')} %" for _, name, _ in factors))
    figures = table("Factors per layer", header, rows, text_columns=())
    return f"<details><summary>Figures of each layer, {escape(first)} → {escape(second)}</summary>{figures}</details>"


def cover_section(before: Side, after: Side) -> str:
    """Show what share of the load has its expert elsewhere after each single loss; nothing on one rank."""
    if after.plan.num_ranks < 2 or not after.demand.load_MLE.any():
        return ""
    cover_2R = [step_cover(side.plan, side.demand) for side in (before, after)]
    order = np.argsort(cover_2R[1], kind="stable")
    shown = sorted(order[:MAX_COVER_ROWS].tolist())
    worst = int(order[0])
    copies = after.plan.num_copies / max(1, after.plan.replica_MLRB.shape[0] * after.plan.replica_MLRB.shape[1])
    bars = [
        Bar(
            name=f"rank {rank}",
            low=0.0,
            high=float(cover_2R[1][rank]),
            mark=float(cover_2R[0][rank]),
            kind="whole",
            cells=(percent(float(cover_2R[0][rank])), percent(float(cover_2R[1][rank]))),
        )
        for rank in shown
    ]
    layer_LR = replica_cover(after.plan, after.demand)
    least = int(np.argmin(layer_LR.min(axis=1)))
    caption = f"Covered load when a rank is lost; bars from 0 to 100 %, a line marks the {before.name}"
    left_out = len(order) - len(shown)
    whose = "" if before.name == STATIC else f" of {after.name}"
    return section(
        "cover",
        "If a rank were lost: replicas as spares",
        paragraph(
            f"On average {percent(float(cover_2R[1].mean()))} of the routed load has its expert on another rank when "
            f"one is lost ({percent(float(cover_2R[0].mean()))} with {before.words}); the worst is rank {worst} with "
            f"{percent(float(cover_2R[1][worst]))}, and layer {after.plan.layer_ids[least]} is covered least "
            f"({percent(float(layer_LR[least].min()))}). The price is {copies:.1f} copies per micro-batch and "
            f"layer{whose}, which balance asked for anyway."
        ),
        paragraph(
            "Share of token-slots whose expert survives the loss of that rank, over all micro-batches and layers, "
            "counted. Weights are covered, optimizer states are not: those live at homes only (arXiv 2508.21613)."
            + (f" The {MAX_COVER_ROWS} least covered of {len(order)} ranks are shown." if left_out else ""),
            "how",
        ),
        bar_table(caption, ("lost", before.name, after.name), bars, start=0.0, end=1.0),
    )
