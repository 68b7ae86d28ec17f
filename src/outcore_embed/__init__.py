"""Vectors of texts, and how well documents fit a query, by models of mlx-vlm's embedding and reranking types."""
