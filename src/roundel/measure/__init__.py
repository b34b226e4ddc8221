"""Run models over data and measure what they say: against each other, layer by layer, and against labels.

May import everything up to `rules`; knows nothing of the command line or of reports.
"""
