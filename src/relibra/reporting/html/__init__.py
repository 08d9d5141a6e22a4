"""Elements of a page: pieces of HTML, bars, SVG lines, plotly figures; style, scripts and the page around them.

In: numbers and trusted HTML. Out: HTML text. Start with `html_page.py`.
"""
