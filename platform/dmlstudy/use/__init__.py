"""Models put to use: embed, index, retrieve, serve. Needs neither Ray nor MLflow where the model is a folder."""
