"""HTML pages about runs, recorded routes, plans and sweeps.

In: run folders, traces, plans with their demand. Out: one self-contained HTML file per page. `data/` computes numbers,
`html/` draws, `pages/` composes. Start with `pages/report_page.py`.
"""

from relibra.reporting.pages.report_page import write_report

__all__ = ["write_report"]
