"""Options about the run itself."""

from __future__ import annotations

from roundel.quark.rows import ANY, PATH, SWITCH, TEXT, Option, always, refused, to_run

RUN: tuple[Option, ...] = (
    to_run("TmpDir", None, PATH, "temporary_folder"),
    refused(
        "UserCustomOpLibPath",
        None,
        "models run in a stock ONNX Runtime.",
        "Leave nodes of other domains out with nodes_to_exclude after converting them to standard ones.",
        ANY,
    ),
    to_run("EvalMetrics", None, ANY, "evaluate"),
    to_run("EvalDataReader", None, ANY, "evaluation_data"),
    always("FillAllValueInfo", False, SWITCH, "every tensor's type and shape are in the file."),
    refused(
        "EncryptionAlgorithm",
        None,
        "files are written in the clear.",
        "Encrypt the finished file, or use the execution provider's encryption_key.",
        TEXT,
    ),
    to_run("Recipe", {}, ANY, "recipe_changes"),
)
