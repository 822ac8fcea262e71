"""Who wrote this: shares of what is read of a model, by what wrote the residual stream."""
