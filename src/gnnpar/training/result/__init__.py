"""Results of a run: result.json, the trained model, its export."""
