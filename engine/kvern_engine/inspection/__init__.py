"""What a model is, what it takes and where it fits, found out without loading weights or torch (`kvern inspect`)."""
