"""Statistics of a verdict: pairs of families, by seeds and by classes. Knows no engine, no store and no run."""
