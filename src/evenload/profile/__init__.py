"""What a layer costs: operators, bytes and seconds of one layer of each kind."""
