------------------------------- MODULE Lease -------------------------------
(* When may a worker trust its lease?  The store stamps the expiry when it   *)
(* executes a renewal; request and reply travel for any time, or get lost.   *)
(* Ages instead of instants, so the model has no last tick.                  *)
EXTENDS Integers
CONSTANTS
  Lease, Margin,
  FromSend,      \* O9  trust counts from when the renewal was sent; FALSE: from its reply
  Computed,      \* O9  trust is computed when asked; FALSE: read from a flag that a timer clears late
  RenewsLive     \* O24 a renewal asks whether the session is dead; FALSE: it does not
VARIABLES left,  \* of the lease, by the store
          dead, sent, done, trust, flag, bad
vars == <<left, dead, sent, done, trust, flag, bad>>
Nobody == -1     \* no request under way; else the age of the request
Less(n) == IF n > 0 THEN n - 1 ELSE 0
Init == /\ left = Lease /\ dead = FALSE /\ sent = Nobody /\ done = FALSE
        /\ trust = Lease - Margin /\ flag = TRUE /\ bad = {}
Tick == /\ left' = Less(left) /\ trust' = Less(trust)
        /\ sent' = IF sent = Nobody \/ sent = Lease THEN sent ELSE sent + 1
        /\ UNCHANGED <<dead, done, flag, bad>>
Renew == sent = Nobody /\ sent' = 0 /\ UNCHANGED <<left, dead, done, trust, flag, bad>>
Execute == /\ sent # Nobody /\ ~done /\ (dead => ~RenewsLive)
           /\ left' = Lease /\ done' = TRUE /\ bad' = bad \cup (IF dead THEN {"beat"} ELSE {})
           /\ UNCHANGED <<dead, sent, trust, flag>>
Reply == LET new == Lease - Margin - (IF FromSend THEN sent ELSE 0) IN
         /\ done /\ trust' = (IF new > trust THEN new ELSE trust) /\ flag' = TRUE
         /\ sent' = Nobody /\ done' = FALSE /\ UNCHANGED <<left, dead, bad>>
Lost == sent # Nobody /\ sent' = Nobody /\ done' = FALSE /\ UNCHANGED <<left, dead, trust, flag, bad>>
Timer == trust = 0 /\ flag /\ flag' = FALSE /\ UNCHANGED <<left, dead, sent, done, trust, bad>>
Judged == ~dead /\ left = 0 /\ dead' = TRUE /\ UNCHANGED <<left, sent, done, trust, flag, bad>>
\* a graph step, model call, tool call or write begins
Begin == /\ (IF Computed THEN trust > 0 ELSE flag)
         /\ bad' = bad \cup (IF trust > 0 THEN {} ELSE {"untrusted"})
         /\ UNCHANGED <<left, dead, sent, done, trust, flag>>
Next == Tick \/ Renew \/ Execute \/ Reply \/ Lost \/ Timer \/ Judged \/ Begin
Spec == Init /\ [][Next]_vars
\* while the worker trusts itself nobody may have declared it dead
I10 == trust > 0 => ~dead
I11 == "untrusted" \notin bad
I12 == "beat" \notin bad
=============================================================================
