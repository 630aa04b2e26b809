"""KServe integration: a serving runtime, and a predictor for KServe's V1 and V2 protocols."""
