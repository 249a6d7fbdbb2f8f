"""Models put to use: embed, index, retrieve, serve, export; without Ray and MLflow where the model is a folder."""
