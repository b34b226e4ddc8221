"""Hardware and operators as data: what may be quantized and how. Nothing here runs code on a model."""
