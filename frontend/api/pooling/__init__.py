"""APIs of embeddings: vectors of texts, and similarities of texts."""
