"""The data that strategies price themselves with: traced model, graph statistics, machine and rates."""
