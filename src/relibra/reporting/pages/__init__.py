"""Whole pages and their sections.

In: values of `reporting.data`. Out: one self-contained HTML file. Start with `report_page.py`.
"""
