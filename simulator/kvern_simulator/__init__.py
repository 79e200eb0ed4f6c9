"""A simulator of services under load: the operator's real decisions against simulated engines and pods."""
