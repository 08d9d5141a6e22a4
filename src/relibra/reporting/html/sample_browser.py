"""The sampled responses of a run, by step: best, worst and longest.

Every sample is plain HTML that opens without a script; page.js only chooses which are shown, and in which order.
"""

from __future__ import annotations

from html import escape

from relibra.printable import plural
from relibra.reporting.data.number_format import count
from relibra.reporting.data.samples import Sample, Samples
from relibra.reporting.html.html import paragraph, section

ORDERS = (("best", "best first"), ("worst", "worst first"), ("longest", "longest first"))
SHOWN = 12
"""Samples shown at once."""

_PREVIEW_CHARACTERS = 90


def sample_browser(samples: Samples) -> str:
    """Show samples with a choice of step and order; "" without samples."""
    if not samples.of_steps:
        return ""
    steps, last = samples.steps, samples.steps[-1]
    left_out = samples.num_steps - len(steps)
    options = '<option value="">all steps</option>' + "".join(
        f'<option value="{step}"{" selected" * (step == last)}>step {step}</option>' for step in steps
    )
    orders = "".join(f'<option value="{value}">{text}</option>' for value, text in ORDERS)
    notes = [
        "Some responses of each step from rank 0: the best, the worst and the longest that ended.",
        f"{plural(left_out, 'step')} of {count(samples.num_steps)} are not shown." * bool(left_out),
        f"{plural(samples.unreadable, 'line')} of samples.jsonl could not be read." * bool(samples.unreadable),
    ]
    return section(
        "samples",
        "Sampled responses",
        paragraph(" ".join(note for note in notes if note), "how"),
        f'<div class="choices" hidden>\n<label>Step <select id="sample-step">{options}</select></label>\n'
        f'<label>Order <select id="sample-order">{orders}</select></label>\n'
        f'<span id="sample-count" class="how" role="status"></span></div>',
        f'<div id="sample-list" data-shown="{SHOWN}">',
        "\n".join(_item(sample) for sample in samples.of_steps),
        "</div>",
    )


def _item(sample: Sample) -> str:
    facts = [
        f"step {sample.step}",
        "" if sample.number is None else f"sample {sample.number}",
        "" if sample.tokens is None else plural(sample.tokens, "token"),
        {"stop": "ended by itself", "length": "truncated at the longest length"}.get(sample.finish, sample.finish),
        plural(sample.windows, "window") if sample.windows and sample.windows > 1 else "",
    ]
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    start = " ".join(sample.response[: 4 * _PREVIEW_CHARACTERS].split())[:_PREVIEW_CHARACTERS] or "(empty)"
    data = f'data-step="{sample.step}" data-tokens="{-1 if sample.tokens is None else sample.tokens}"'
    if sample.reward is not None:
        data += f' data-reward="{sample.reward!r}"'
    return (
        f'<details class="sample" {data}>\n<summary><b>{escape(reward)}</b> '
        f'<span class="how">{escape(" · ".join(fact for fact in facts if fact))}</span>\n'
        f'<span class="start">{escape(start)}</span></summary>\n'
        f"<h4>Prompt</h4>\n<pre>\n{escape(sample.prompt) or '(empty)'}</pre>\n"
        f"<h4>Response</h4>\n<pre>\n{escape(sample.response) or '(empty)'}</pre>\n</details>"
    )
