"""fastqt with others' libraries, each of which is an extra and imported only where it is used."""
