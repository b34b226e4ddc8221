"""Olive: a pass that quantizes with Roundel. May import the pipeline; the pass itself imports Olive.

    python -m roundel.olive package.json
    olive run --config workflow.json --package-config package.json

with a pass of the type `RoundelQuantization` in the workflow. See docs/olive.md.
"""
