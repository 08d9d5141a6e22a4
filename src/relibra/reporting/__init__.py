"""What people look at: summaries of routes and metrics, pictures, and one HTML page. No torch in here."""

from relibra.reporting.pages.report_page import write_report

__all__ = ["write_report"]
