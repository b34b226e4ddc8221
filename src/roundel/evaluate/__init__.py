"""Run models over data, and judge what they say: against each other, against labels, and folder by folder."""

from roundel.evaluate.folders import FileScore, FolderScores, Summary, evaluate_folders
from roundel.evaluate.infer import Inference, infer
from roundel.evaluate.lint import DataReport, lint_data
from roundel.evaluate.models import ModelScore, evaluate_models
from roundel.evaluate.similarity import Similarity

__all__ = [
    "DataReport",
    "FileScore",
    "FolderScores",
    "Inference",
    "ModelScore",
    "Similarity",
    "Summary",
    "evaluate_folders",
    "evaluate_models",
    "infer",
    "lint_data",
]
