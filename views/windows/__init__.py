"""Windows of event time: their settings and the steps that compute them."""
