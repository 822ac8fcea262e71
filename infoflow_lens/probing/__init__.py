"""The engine of `infoflow-lens probe`: any model, any data, one folder of results."""
