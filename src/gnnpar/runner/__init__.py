"""One run from Settings to result.json: launch ranks, the training loop, evaluation, measurement."""
