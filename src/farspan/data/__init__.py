"""Text data: documents, tokenizers, packed token shards, windows, and the training mixture."""
