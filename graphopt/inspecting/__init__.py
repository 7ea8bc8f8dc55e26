"""Inspection: a model in; its graphs before and after each pass, as data, text, DOT and one HTML page, out.

    capture.py    the model runs once without weights; every graph goes through the passes
    nodes.py      graphs as rows, runs of equal blocks
    diff.py       what a pass replaced by what
    answer.py     why a place was or was not rewritten
    text.py, dot.py, page.py   the three ways to show it
"""
