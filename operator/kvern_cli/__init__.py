"""The command `kvern`: local mode and status here, the engine's commands handed to the engine where it is installed."""
