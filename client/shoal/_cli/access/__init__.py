"""Commands about who may use a cluster: certificates and tokens. Only `_cli` imports them."""
