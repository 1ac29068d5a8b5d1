"""The laboratory: which position encoding generalises to longer inputs? Small tasks whose answers can be computed."""
