"""What a page is made of: templates, style, scripts and plotly figures.

In: values. Out: HTML text, every value escaped. Start with `page.py` and `templates/page.html`.
"""
