"""What a run leaves: result.json, the trained model, its export."""
