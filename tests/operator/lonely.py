"""An autoscaler that asks nobody, for what it makes of a service before any figures come."""

from datetime import datetime

from kvern_operator.autoscale.loop import Autoscaler
from kvern_operator.autoscale.readings import Round


class LonelyAutoscaler(Autoscaler):
    """With nobody to ask, at one moment."""

    def __init__(self, now: datetime) -> None:
        async def scrape(targets):
            return Round({}, {}, {})

        class Nothing:
            async def read(self, namespaces):
                return dict.fromkeys(namespaces)

            def __getattr__(self, name):
                return lambda *values: None

        super().__init__(scrape, Nothing(), Nothing(), lambda key: None, clock=lambda: 0.0, wall=now.timestamp)
