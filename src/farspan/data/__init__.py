"""Text, from wherever it lies, as whole documents."""
