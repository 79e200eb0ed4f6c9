"""HTTP/1.1 as the API server speaks it: an ASGI server on httptools' parser.

`head.py` judges heads and words responses (pure), `exchange.py` is one request and its response, `connection.py` one
TCP connection, `server.py` the listener with the sweep that ends what takes too long.
"""
