package vigil

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
)

// Secret proves to the daemon that a registration is the asker's. It is never to be
// written anywhere; its Notice is for the registration.
type Secret [sha256.Size]byte

// NewSecret draws a secret. Each registration should have one of its own.
func NewSecret() Secret {
	var s Secret
	_, _ = rand.Read(s[:]) // it never fails
	return s
}

// Notice is what the field notice of the registration has to say: the SHA-256 of the
// secret, in hex.
func (s Secret) Notice() string {
	sum := sha256.Sum256(s[:])
	return hex.EncodeToString(sum[:])
}

// String keeps the secret out of logs.
func (s Secret) String() string { return "secret" }

// GoString keeps it out of %#v.
func (s Secret) GoString() string { return "secret" }
