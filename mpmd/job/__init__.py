"""From the launcher's variables to a `Job`: processes that find each other, agree, watch and end together."""
