"""Float against quantized, tensor by tensor."""
