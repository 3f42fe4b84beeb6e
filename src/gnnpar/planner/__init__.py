"""From a model, a graph and a topology to a Plan, with predicted time and memory. Produces data, runs nothing of it."""
