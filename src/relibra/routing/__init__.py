"""What the router did: traces, their files, the demand they make, and statistics. No torch in here."""
