"""fastqt together with other libraries. Each is an optional extra and is imported only where it is used."""
